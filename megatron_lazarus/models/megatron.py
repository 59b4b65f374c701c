"""The only place that imports Megatron Core: everything the models use from it, without its import-time noise.

Megatron Core warns once per module when Transformer Engine or apex are absent (neither is needed here), which
is tens of lines for a few ranks. The filters hold only while it is imported.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.datasets import helpers_cpp as dataset_helpers
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.gpt import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tokenizers import MegatronTokenizer
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

__all__ = [
    "MLP",
    "AttnMaskType",
    "BlendedMegatronDatasetBuilder",
    "ColumnParallelLinear",
    "DType",
    "GPTDataset",
    "GPTDatasetConfig",
    "GPTModel",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "MLPSubmodules",
    "MegatronTokenizer",
    "ModuleSpec",
    "ProcessGroupCollection",
    "RotaryEmbedding",
    "RowParallelLinear",
    "SelfAttention",
    "SelfAttentionSubmodules",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "TransformerLayer",
    "TransformerLayerSubmodules",
    "WrappedTorchNorm",
    "dataset_helpers",
    "get_bias_dropout_add",
    "quiet_build",
]


@contextmanager
def quiet_build() -> Iterator[None]:
    """Hold back what Megatron Core says of every MLP class that is not its own, and of its own default settings."""
    logger = logging.getLogger("megatron.core.transformer.transformer_layer")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"megatron\.core\.")
            yield
    finally:
        logger.setLevel(level)
