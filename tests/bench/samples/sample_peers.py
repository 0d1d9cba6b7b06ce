"""Ray and TransferQueue between a producer and a consumer, for the samples bench.

Needs nothing of this package but `sample_driver` and `sample_rows`, so that it runs in an environment of its own.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tests.bench.samples.sample_driver import Columns, main

HOST = "127.0.0.1"


class RowBuffer:
    """A replay buffer with a value per row and column, as a central actor holds it."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._values: dict[str, dict[int, Any]] = {}
        self._columns_of: dict[int, set[str]] = {}
        self._taken: set[int] = set()

    def put(self, rows: Sequence[int], columns: Columns) -> None:
        for name, values in columns.items():
            self._values.setdefault(name, {}).update(zip(rows, values, strict=True))
        for row in rows:
            self._columns_of.setdefault(row, set()).update(columns)

    def get(self, num_rows: int, names: Sequence[str]) -> Columns:
        wanted = set(names)
        ready = [row for row, has in self._columns_of.items() if row not in self._taken and wanted <= has][:num_rows]
        self._taken.update(ready)
        columns: Columns = {}
        for name in names:
            values = [self._values[name][row] for row in ready]
            columns[name] = np.stack(values) if len({np.shape(value) for value in values}) == 1 else values
        return columns

    def num_ready(self) -> int:
        return len(self._columns_of) - len(self._taken)


_QUIET = {"log_to_driver": False, "logging_level": "ERROR"}


@contextlib.contextmanager
def _serve_ray() -> Iterator[str]:
    """Ray on the loopback interface, with its files in a folder that goes with it."""
    import ray

    # A short name: the paths of Unix sockets below it may have about a hundred letters.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        # Logical processors: actors must fit, whatever the machine has.
        sizes = {"num_cpus": 16, "include_dashboard": False, "object_store_memory": 1 << 30}
        ray.init(**sizes, **_QUIET, _temp_dir=folder, _node_ip_address=HOST)
        try:
            yield ray.get_runtime_context().gcs_address
        finally:
            ray.shutdown()


def _join_ray(address: str) -> None:
    import ray

    if not ray.is_initialized():
        ray.init(address=address, **_QUIET)


class RayActor:
    """A central actor; large arguments and results go through Ray's object store."""

    packed = False

    def __init__(self, address: str):
        import ray

        _join_ray(address)
        self._wait, self._buffer = ray.get, ray.get_actor("buffer", namespace="samples")

    @staticmethod
    @contextlib.contextmanager
    def serve() -> Iterator[str]:
        with _serve_ray() as address:
            import ray

            buffer = ray.remote(RowBuffer).options(name="buffer", namespace="samples").remote()
            ray.get(buffer.num_ready.remote())
            yield address

    def put(self, rows: Sequence[int], columns: Columns) -> None:
        self._wait(self._buffer.put.remote(rows, columns))

    def get(self, num_rows: int, names: Sequence[str]) -> Columns:
        return self._wait(self._buffer.get.remote(num_rows, names))

    def num_ready(self) -> int:
        return self._wait(self._buffer.num_ready.remote())

    def clear(self) -> None:
        self._wait(self._buffer.clear.remote())


class TransferQueue:
    """TransferQueue with one storage unit."""

    packed = False
    partition = "step"

    def __init__(self, address: str):
        import transfer_queue

        _join_ray(address)
        transfer_queue.init()
        self._client, self._put = transfer_queue.get_client(), transfer_queue.kv_batch_put

    @staticmethod
    @contextlib.contextmanager
    def serve() -> Iterator[str]:
        with _serve_ray() as address:
            import transfer_queue
            from omegaconf import OmegaConf

            storage = {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": 1}}
            transfer_queue.init(OmegaConf.create({"backend": storage, "controller": {"polling_mode": True}}))
            try:
                yield address
            finally:
                transfer_queue.close()

    def put(self, rows: Sequence[int], columns: Columns) -> None:
        import torch
        from tensordict import TensorDict

        fields = {}
        for name, values in columns.items():
            if isinstance(values, list):
                fields[name] = torch.nested.as_nested_tensor(list(map(torch.from_numpy, values)), layout=torch.jagged)
            else:
                fields[name] = torch.from_numpy(values)
        keys = [str(row) for row in rows]
        self._put(keys=keys, partition_id=self.partition, fields=TensorDict(fields, batch_size=len(keys)))

    def get(self, num_rows: int, names: Sequence[str]) -> Columns:
        meta = self._client.get_meta(list(names), num_rows, self.partition, mode="fetch", task_name="update")
        columns = self._client.get_data(meta)
        return {name: columns[name] for name in names}

    def num_ready(self) -> int:
        return not self._client.check_consumption_status("update", self.partition)

    def clear(self) -> None:
        self._client.clear_partition(self.partition)


if __name__ == "__main__":
    main({"ray": RayActor, "transferqueue": TransferQueue})
