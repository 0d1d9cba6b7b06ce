"""The rate of an update's useful products beside that of one large product."""

from __future__ import annotations

from spmdrl.engines.models.make_model import RandomWeights
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.settings.training_config import OptimConfig, TrainingConfig
from spmdrl.resources.layout import UpdateLayout, fit_update_layout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.verbs.doctor.device_verbs import median_seconds
from spmdrl.verbs.doctor.stage_run import StageRun
from tests.bench.harness.bench_models import QWEN_0_5B, TINY
from tests.bench.training.training import MATMUL_SIZE, RowSizes, make_rows, matmul_rate, mean_loss_of, useful_flops

_MODELS = {"full": QWEN_0_5B, "small": TINY}
_ROWS = {
    "full": RowSizes(rows=192, mean_length=512, longest=4096),
    "small": RowSizes(rows=16, mean_length=24, longest=64),
}
_PRODUCT_SIZES = {"full": MATMUL_SIZE, "small": 512}


def check_update_speed(run: StageRun) -> None:
    """Time updates of one model, sharded over all ranks; each rank has rows of its own. Collective over the world."""
    config, world = _MODELS[run.scale], run.world
    rows = make_rows(config.vocab_size, _ROWS[run.scale])
    mesh = build_update_mesh(fit_update_layout(UpdateLayout(), world.size), run.device, world.rank)
    engine = TrainingEngine(config, TrainingConfig(), OptimConfig(lr=1e-5), mesh, run.device)
    engine.load(RandomWeights(config, seed=0))
    loss = mean_loss_of(rows.num_response_tokens * world.size)
    results = []
    seconds = median_seconds(lambda: results.append(engine.update(rows, loss)), run.device, repeats=3)
    flops, large_product = useful_flops(config, rows), matmul_rate(run.device, _PRODUCT_SIZES[run.scale])
    run.figures["seconds_per_update"] = seconds
    run.figures["tokens_per_second"] = rows.tokens_T.numel() / seconds
    run.figures["tflops"], run.figures["large_product_tflops"] = flops / seconds / 1e12, large_product / 1e12
    run.figures["share_of_large_product"] = flops / seconds / large_product
    run.figures["microbatches"] = results[-1].num_microbatches
    run.require(not any(result.skipped for result in results), "an update was skipped, as a gradient wasn't finite")
    if not run.device.is_cpu:
        run.figures["peak_gib"] = run.device.take_peak_bytes() / 2**30
