"""The environment that workers start with: an allow-list, so that a job's secrets aren't handed on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Where programs and libraries are found, how text is read, which devices there are; nothing that opens an account.
_NAMES = frozenset(
    "PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR TEMP TMP PWD TERM LD_LIBRARY_PATH DYLD_LIBRARY_PATH "
    "VIRTUAL_ENV CONDA_PREFIX XDG_CACHE_HOME HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_DATASETS_CACHE "
    "TRANSFORMERS_OFFLINE TORCH_HOME NLTK_DATA CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_HOME CUDA_PATH "
    "NVIDIA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES SSL_CERT_FILE SSL_CERT_DIR "
    "REQUESTS_CA_BUNDLE CURL_CA_BUNDLE JAVA_HOME COVERAGE_PROCESS_START"
    .split()
)  # fmt: skip
_PREFIXES = ("LC_", "PYTHON", "ASCEND_", "OMP_", "OPENBLAS_", "MKL_", "TORCH_DEVICE_BACKEND_")
# They are mostly scalar code; the threads of numeric libraries would only take cores and memory from the rank.
_FIXED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def clean_environment(
    environment: Mapping[str, str], also: Sequence[str], python_path: str, *, key: str
) -> dict[str, str]:
    """Those variables that are on the list or named in `also`, the setting `key`.

    Raises ValueError where one of `also` isn't set.
    """
    missing = [name for name in also if name not in environment]
    if missing:
        raise ValueError(
            f"{key} names {', '.join(missing)}, but the job's environment has no such variable; "
            "set it where the job is started, or take it out"
        )
    passed = {name: value for name, value in environment.items() if name in _NAMES or name.startswith(_PREFIXES)}
    return {**passed, **_FIXED, **{name: environment[name] for name in also}, "PYTHONPATH": python_path}
