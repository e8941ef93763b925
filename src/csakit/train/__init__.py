"""`csakit train` as a library: the settings of a run, here; what runs them, `csakit.train.loop`.

    from csakit.train import DataConfig, RunConfig, WarmupStage
    from csakit.train.loop import prepare

    config = RunConfig(stages=("warmup",), data=DataConfig(path="texts"), warmup=WarmupStage(steps=50))
    prepare(config, Path("runs/mine")).run()

Importing this needs no torch.
"""

from .config import DataConfig, DenseStage, ModelConfig, RunConfig, SparseStage, StageConfig, StartConfig, WarmupStage
from .presets import PRESETS

__all__ = ["PRESETS", "DataConfig", "DenseStage", "ModelConfig", "RunConfig", "SparseStage", "StageConfig", "StartConfig", "WarmupStage"]
