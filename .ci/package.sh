#!/usr/bin/env bash
# Build the package, install the wheel into a new environment, and use it there as a user would:
#     .ci/package.sh PYTHON
# The reply needs vLLM, which takes gigabytes: it is imported from PYTHON's environment, everything else from the new one.
# Its models are tiny; tests/integration/test_readme.py runs README's example on the default ones.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
root=$PWD
rm -rf dist build/fresh
"$python" -m build --outdir dist . > build.log 2>&1 || { cat build.log; exit 1; }
rm -f build.log
"$python" -m venv --without-pip build/fresh
fresh=$root/build/fresh/bin
# Compiling every module of the dependencies takes longer than installing them; Python compiles those that it imports.
"$python" -m pip --python "$fresh/python" --disable-pip-version-check --quiet --quiet install --no-compile dist/*.whl pytest

# Outside the checkout, so that Python imports nothing from it.
away=$(mktemp -d)
trap 'rm -rf "$away"' EXIT
cd "$away"
"$fresh/lookahead-agent" --version
"$fresh/lookahead-agent" new my-agent --template react > /dev/null
(cd my-agent && "$fresh/python" -m pytest -q -p no:cacheprovider)

"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    > "$("$fresh/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/engines-of-another.pth"
"$fresh/python" -c "
import lookahead_agent, sys
sys.exit(not lookahead_agent.__file__.startswith('$root/build/fresh/') and f'not the wheel: {lookahead_agent.__file__}')"
(cd "$root" && TQDM_DISABLE=1 "$python" -c "
import sys, pathlib
from tests.integration.tiny_models import make_pair
make_pair(pathlib.Path(sys.argv[1]))" "$away")
"$fresh/lookahead-agent" ask --model "$away/target" --draft "$away/draft" --policy exact --depth 4 \
    --temperature 0 --max-tokens 60 --engine-arg dtype=float32 --engine-arg kv_cache_memory_bytes=33554432 \
    --engine-arg max_model_len=1024 "A two and three?"
