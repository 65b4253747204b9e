#!/usr/bin/env bash
# Redraws every committed table and figure from the committed records, and says whether a byte changed.
#
#   scripts/reproduce.sh [RESULTS]      RESULTS: a results folder (default: results)
#
# Needs neither torch nor a GPU: numpy, pyarrow and matplotlib of constraints.txt. (Another matplotlib or
# freetype draws the same figures with other bytes.) PYTHON chooses the interpreter (default: python3).
# Exit code 0: every file came out byte by byte as it was; 1: some did not, they are listed; 2: an error.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
results=${1:-results}

run() {
    "$python" -m replayssm "$@" >/dev/null || exit 2
}

# Digests of all tables, figures and scores: everything but the records and prose.
digests() {
    "$python" - "$results" <<'PYTHON'
import hashlib, pathlib, sys

root = pathlib.Path(sys.argv[1])
drawn = {".csv", ".md", ".png", ".svg", ".json"}
for path in sorted(root.rglob("*")):
    if path.is_file() and path.suffix in drawn and path.name != "README.md":
        print(hashlib.sha256(path.read_bytes()).hexdigest(), path)
PYTHON
}

before=$(digests)
if [ -d "$results/runs" ]; then run report "$results/runs"; fi
if [ -d "$results/tasks" ]; then run rescore "$results/tasks"; fi
if [ -d "$results/speculation" ]; then run speculation --redraw --out "$results/speculation"; fi
for record in "$results"/bench/kernels/{*,lengths/*}/kernels.json "$results"/bench/{decode/decode,speculate/speculate}.json \
    "$results"/bench/speculate/*/speculate.json; do
    if [ -f "$record" ]; then run bench "$(basename "$record" .json)" --redraw --out "$(dirname "$record")"; fi
done
after=$(digests)

if [ -d "$results/runs" ]; then run report "$results/runs" --check; fi
if [ "$before" != "$after" ]; then
    echo "These files came out differently:"
    diff <(echo "$before") <(echo "$after") | sed -n 's/^[<>] [0-9a-f]* \(.*\)$/  \1/p' | sort -u
    exit 1
fi
echo "$(echo "$after" | wc -l) files under $results came out byte by byte as they were."
