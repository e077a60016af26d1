#!/usr/bin/env bash
# Breaks what lies between hosts: two and three of them from network, PID and UTS namespaces, and a Slurm of two nodes.
# Needs root; without it, or without namespaces, the tests are skipped and say why. Installs from Debian what is missing.
# Prints a table of what broke, the seconds until the last rank knew, and whom they named. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh test
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  missing=()
  for pair in ip:iproute2 nft:nftables slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge; do
    PATH=$PATH:/usr/sbin command -v "${pair%%:*}" >/dev/null || missing+=("${pair#*:}")
  done
  if [ ${#missing[@]} -gt 0 ]; then
    echo "test_hosts: installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update && apt-get install --yes --no-install-recommends "${missing[@]}"; } >/tmp/eprt-hosts-apt.log 2>&1 ||
      { tail -n 5 /tmp/eprt-hosts-apt.log >&2; echo "test_hosts: what they are for will be skipped" >&2; }
  fi
fi
export PATH=$PATH:/usr/sbin OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec .venv/bin/python -m pytest tests/hosts -q --durations 5 "$@"
