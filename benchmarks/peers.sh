#!/bin/sh
# Makes .venv-peers, where the libraries compared with live: their pins exclude those of dataload itself.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-$(command -v python3.11 || command -v python3)}
venv=${PEERS_VENV:-.venv-peers}
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --requirement benchmarks/peers.txt
"$venv/bin/python" -m pip install --quiet --no-deps --editable .
"$venv/bin/python" -m pip check || echo "above: requirements of dataload itself that its peers do without"
