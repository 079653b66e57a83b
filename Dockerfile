# mismatch-cli with vLLM and PyTorch for CPUs, in the versions that requirements/cpu.lock pins:
#
#   docker build -t mismatch-cli .
#   docker run --rm --user "$(id -u)" -v "$PWD:/runs" mismatch-cli report
FROM python:3.11-slim-bookworm AS build
# PyTorch's builds for CPUs are on an index of their own.
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
WORKDIR /src
RUN python -m venv /opt/mismatch-cli
COPY requirements/cpu.lock requirements/
COPY .ci/install .ci/
RUN PIP_NO_CACHE_DIR=1 .ci/install /opt/mismatch-cli/bin/pip requirements/cpu.lock
COPY . .
# Bytecode is made here, since whoever runs the image cannot write it: without, each command compiles torch and vLLM again.
# Some packages carry templates that are not Python; what cannot be compiled is left as it is.
RUN /opt/mismatch-cli/bin/pip install --no-cache-dir --no-deps . \
 && { /opt/mismatch-cli/bin/python -m compileall -q -j 0 /opt/mismatch-cli/lib > /dev/null || true; }

FROM python:3.11-slim-bookworm
# vLLM's kernels need libnuma; everything else is in the wheels. Any --user may write into both folders.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends libnuma1 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 1000 runner \
 && install --directory --owner runner --mode 777 /home/runner /runs
COPY --from=build /opt/mismatch-cli /opt/mismatch-cli
ENV PATH=/opt/mismatch-cli/bin:$PATH HOME=/home/runner USER=runner
USER 1000
WORKDIR /runs
VOLUME /runs
ENTRYPOINT ["mismatch-cli"]
CMD ["--help"]
