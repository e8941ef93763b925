"""csakit.checkpoints: attention weights of DeepSeek-V4 checkpoints, in three key dialects.

    config = HybridAttentionConfig.from_pretrained_config(json.load(open(folder / "config.json")))
    with torch.device("meta"):
        layers = {number: attention_layer(config, number) for number in range(4)}
    load_attention(layers, folder)                                   # tensor by tensor, FP8 dequantized on the way
    save_attention(layers, new_folder, dialect="transformers_saved")

Everything else in a checkpoint (embeddings, experts, other norms, multi-token prediction) is left alone.
"""

from .keys import DIALECTS, AttentionKey, format_key, official_names, parse_key
from .load import LoadReport, load_attention, read_attention
from .quantization import dequantize, quantize
from .save import save_attention

__all__ = [
    "DIALECTS",
    "AttentionKey",
    "LoadReport",
    "dequantize",
    "format_key",
    "load_attention",
    "official_names",
    "parse_key",
    "quantize",
    "read_attention",
    "save_attention",
]
