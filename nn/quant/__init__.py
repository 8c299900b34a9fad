"""Storage formats of weights: decoding and encoding in NumPy, the device layout, and the matrix in device memory."""

from nn.quant.formats import FORMATS, Format, dequantize, format_of, quantize
from nn.quant.weight import Weight, Window

__all__ = ["FORMATS", "Format", "Weight", "Window", "dequantize", "format_of", "quantize"]
