# An image for CUDA GPUs. It hasn't been built: no Docker was at hand.
#   docker build -f launch/docker/cuda.Dockerfile --build-arg EXTRAS=math,vllm -t spmdrl:cuda .
#   docker run --rm --gpus all --ipc host -v "$PWD:/work" -w /work spmdrl:cuda python -m spmdrl doctor
# PyTorch's wheels bring CUDA's libraries, so that the host needs the driver and NVIDIA's container toolkit alone.
FROM python:3.12-slim-bookworm

# Compilers of the kernels for CPUs (g++) and of Triton (gcc); git names the source's version in a run's summary.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*

ARG EXTRAS=math,vllm
WORKDIR /opt/spmdrl
# What changes seldom first: the dependencies stay a layer of their own while the source changes.
COPY setup.cfg pyproject.toml LICENSE README.md ./
COPY docs docs
COPY configs configs
COPY src/spmdrl/__init__.py src/spmdrl/__init__.py
RUN pip install --no-cache-dir --editable ".[${EXTRAS}]"
COPY src src
COPY launch launch

# A user of its own; `docker run --user "$(id -u):$(id -g)"` for files of yours.
ENV PYTHONUNBUFFERED=1 HF_HOME=/work/.hf
CMD ["python", "-m", "spmdrl", "--help"]
