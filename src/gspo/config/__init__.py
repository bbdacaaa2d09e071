"""Every knob of a run: what there is (schema), which values can work (ranges), how they are written (values)."""

from gspo.config.ranges import LARGEST, LONGEST_WAIT, MIN_TEMPERATURE
from gspo.config.schema import (
    PAPER_CLIP,
    AlgorithmConfig,
    BatchConfig,
    ColdstartConfig,
    Config,
    EngineConfig,
    EvalConfig,
    ModelConfig,
    Objective,
    OptimizerConfig,
    RolloutConfig,
    RoutingReplay,
    RunConfig,
    TaskConfig,
    TrackConfig,
    known_keys,
)
from gspo.config.values import as_path

__all__ = [
    "LARGEST", "LONGEST_WAIT", "MIN_TEMPERATURE", "PAPER_CLIP", "AlgorithmConfig", "BatchConfig", "ColdstartConfig",
    "Config", "EngineConfig", "EvalConfig", "ModelConfig", "Objective", "OptimizerConfig", "RolloutConfig",
    "RoutingReplay", "RunConfig", "TaskConfig", "TrackConfig", "as_path", "known_keys",
]  # fmt: skip
