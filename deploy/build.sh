#!/usr/bin/env bash
# Builds the image, and pushes it where it is told to:
#
#     deploy/build.sh                                     vllm-dsv4:vllm-0.33.0, here
#     REGISTRY=registry.example.com/team deploy/build.sh --push
#
# VLLM_IMAGE and UV_IMAGE replace the two images that it starts from, such as by a mirror's; vLLM
# must stay 0.33.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

push=false
case "$*" in
    "") ;;
    --push) push=true ;;
    *)
        echo "usage: [REGISTRY=HOST/PATH] deploy/build.sh [--push]" >&2
        exit 2
        ;;
esac
if [[ $push == true && -z ${REGISTRY:-} ]]; then
    echo "build.sh: set REGISTRY to say where to push, such as registry.example.com/team" >&2
    exit 2
fi

image="${REGISTRY:+${REGISTRY%/}/}vllm-dsv4:vllm-0.33.0"
options=(--file deploy/Dockerfile --tag "$image" --build-arg "VERSION=$(cat VERSION)")
for name in VLLM_IMAGE UV_IMAGE; do
    if [[ -n ${!name:-} ]]; then
        options+=(--build-arg "$name=${!name}")
    fi
done

DOCKER_BUILDKIT=1 docker build "${options[@]}" .
if [[ $push == true ]]; then
    docker push "$image"
fi
echo "$image"
