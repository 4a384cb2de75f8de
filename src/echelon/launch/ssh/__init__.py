"""The ssh launcher: `launcher`, the ssh program and its errors (`client`), copies of the working directory (`sync`)."""
