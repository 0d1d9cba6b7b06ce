# An image for Ascend NPUs. It hasn't been built, and nothing of spmdrl has run on an NPU yet (docs/ascend.md).
#   docker build -f launch/docker/ascend.Dockerfile -t spmdrl:ascend .
#   docker run --rm --ipc host --device /dev/davinci0 --device /dev/davinci_manager --device /dev/devmm_svm \
#     --device /dev/hisi_hdc -v /usr/local/dcmi:/usr/local/dcmi:ro -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi:ro \
#     -v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro -v /etc/ascend_install.info:/etc/ascend_install.info:ro \
#     -v "$PWD:/work" -w /work spmdrl:ascend python -m spmdrl doctor
# The base has CANN and NNAL; the host has driver and firmware of the release that this CANN wants.
ARG CANN=9.1.0-910b-ubuntu22.04-py3.11
FROM quay.io/ascend/cann:${CANN}

RUN apt-get update && apt-get install --yes --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*

ARG TORCH=2.10.0
ARG TORCH_NPU=2.10.0.post4
# npu adds vllm-ascend, which pins this PyTorch.
ARG EXTRAS=math
WORKDIR /opt/spmdrl
COPY setup.cfg pyproject.toml LICENSE README.md ./
COPY docs docs
COPY configs configs
COPY src/spmdrl/__init__.py src/spmdrl/__init__.py
RUN pip install --no-cache-dir "torch==${TORCH}" --index-url https://download.pytorch.org/whl/cpu && \
    pip install --no-cache-dir "torch-npu==${TORCH_NPU}" && \
    pip install --no-cache-dir --editable ".[${EXTRAS}]" "torch==${TORCH}"
COPY src src
COPY launch launch

ENV PYTHONUNBUFFERED=1 HF_HOME=/work/.hf
# CANN's variables, in each process.
ENTRYPOINT ["bash", "-c", "source /usr/local/Ascend/ascend-toolkit/set_env.sh && exec \"$0\" \"$@\""]
CMD ["python", "-m", "spmdrl", "--help"]
