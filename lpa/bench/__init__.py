"""`lpa bench`: layers, whole models, other recognisers and this machine's limits, all through one clock."""

from .clock import measure
from .layer import LAYER_ROWS, LayerRow, bench_layer, layer_table, random_attention

__all__ = ["LAYER_ROWS", "LayerRow", "bench_layer", "layer_table", "measure", "random_attention"]
