// Keeps the page current: exchanges the parts that the server renders, and draws the curves with uPlot.
// Without this script the page reloads itself.
"use strict";

const INTERVAL_MS = 1000;
const CHART_HEIGHT = 200;
const MOST_DOTS = 40; // of a curve whose points are marked
const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400]; // seconds
const charts = [];

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

class Chart {
  constructor(name, digits) {
    this.figure = document.getElementById(`chart-${name}`);
    this.name = name;
    this.digits = digits;
    this.data = [[], [], []];
    this.draw();
    new ResizeObserver(() => this.plot.setSize(this.size())).observe(this.figure);
  }

  size() {
    return { width: Math.max(200, this.figure.clientWidth), height: CHART_HEIGHT };
  }

  // Colours are fixed when a plot is made, so a change of the colour scheme makes it again.
  draw() {
    this.plot?.destroy();
    const axis = { stroke: colour("quiet"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line") } };
    const value = (plot, number) => (number == null ? "–" : number.toFixed(this.digits));
    const few = () => this.numValidations <= MOST_DOTS;
    const line = (label, name, show) => ({
      label, value, stroke: colour(name), width: 2, spanGaps: true, points: { show, size: 6, fill: colour(name) },
    });
    this.plot = new uPlot(
      {
        ...this.size(),
        scales: { x: { time: false } },
        axes: [{ ...axis, size: 34, incrs: TIME_STEPS, values: (plot, ticks) => ticks.map(duration) }, { ...axis, size: 52 }],
        series: [
          { label: "time", value: (plot, seconds) => (seconds == null ? "–" : duration(seconds)) },
          line("training", "quiet", false),
          line("validation", "accent", few),
        ],
      },
      this.data,
      this.figure,
    );
  }

  show(training, validation) {
    this.numValidations = validation.seconds.length;
    this.data = uPlot.join([
      [training.seconds, training[this.name]],
      [validation.seconds, validation[this.name]],
    ]);
    this.plot.setData(this.data);
  }
}

function duration(seconds) {
  const whole = Math.round(seconds);
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (number) => String(number).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

function exchange(html) {
  const next = new DOMParser().parseFromString(html, "text/html");
  for (const part of next.querySelectorAll("[data-part]")) {
    const shown = document.querySelector(`[data-part="${part.dataset.part}"]`);
    if (shown.innerHTML !== part.innerHTML || shown.className !== part.className) {
      shown.className = part.className;
      shown.replaceChildren(...part.childNodes);
    }
  }
}

async function answer(path) {
  const response = await fetch(path);
  if (!response.ok) throw new Error(response.status === 401 ? "the token is not valid any more" : `status ${response.status}`);
  return response;
}

async function update() {
  const connection = document.getElementById("connection");
  try {
    const [html, state] = await Promise.all([
      answer("/live").then((response) => response.text()),
      answer("/api/state").then((response) => response.json()),
    ]);
    exchange(html);
    for (const chart of charts) chart.show(state.training, state.validation);
    document.title = `${state.run.status} · ${state.run.name} · Echelon`;
    connection.hidden = true;
  } catch (error) {
    if (connection.hidden) {
      const why = error instanceof TypeError ? "its process has ended" : error.message;
      connection.textContent = `The page gets no answer since ${new Date().toLocaleTimeString()}: ${why}. This is the last state.`;
      connection.hidden = false;
    }
  }
}

async function keepCurrent() {
  if (!document.hidden) await update();
  setTimeout(keepCurrent, INTERVAL_MS);
}

document.documentElement.classList.add("scripts"); // the curves replace the open table
document.getElementById("values").open = false;
charts.push(new Chart("accuracy", 4), new Chart("loss", 4));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((chart) => chart.draw()));
document.addEventListener("visibilitychange", () => document.hidden || update());
keepCurrent();
