#!/usr/bin/env bash
# Starts llama.cpp's server for `lookahead-agent bench peers`, and builds it first from llama-cpp-python's source package.
#
#   TARGET=target.gguf examples/llama_server.sh 8091
#   TARGET=target.gguf DRAFT=draft.gguf examples/llama_server.sh 8092
#
# Without TARGET it fetches the default target from the Hugging Face Hub; DRAFT=hub does so for the draft. Further arguments go
# to the server. FOLDER keeps the build, which takes ten minutes on two cores and needs cmake and a C++ compiler.
set -euo pipefail
port=${1:?a port}; shift
folder=${FOLDER:-$HOME/.cache/llama.cpp}
server=$folder/build/bin/llama-server
if [ ! -x "$server" ]; then
    mkdir -p "$folder"
    python -m pip download --no-deps --no-binary :all: --dest "$folder" llama-cpp-python==0.3.36
    tar -xzf "$folder"/llama_cpp_python-0.3.36.tar.gz -C "$folder"
    cmake -S "$folder"/llama_cpp_python-0.3.36/vendor/llama.cpp -B "$folder/build" -DCMAKE_BUILD_TYPE=Release \
        -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF
    cmake --build "$folder/build" --target llama-server --parallel
fi
hub=Qwen/Qwen2.5-Coder
model=(-hf "$hub-1.5B-Instruct-GGUF:Q4_K_M")
[ -z "${TARGET:-}" ] || model=(-m "$TARGET")
draft=()
if [ "${DRAFT:-}" = hub ]; then
    draft=(-hfd "$hub-0.5B-Instruct-GGUF:Q4_K_M" --spec-type draft-simple)
elif [ -n "${DRAFT:-}" ]; then
    draft=(-md "$DRAFT" --spec-type draft-simple)
fi
exec "$server" "${model[@]}" "${draft[@]}" --ctx-size 16384 --threads "$(nproc)" --jinja --host 127.0.0.1 --port "$port" "$@"
