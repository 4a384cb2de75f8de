#!/usr/bin/env bash
# Installs the Debian packages that the system tests need. Needs root.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends chromium chromium-driver gridengine-client gridengine-exec gridengine-master iproute2 mpich openmpi-bin openssh-client openssh-server munge rsync slurm-wlm util-linux >/dev/null
