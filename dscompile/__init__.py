"""dscompile: a torch.compile backend that recognises DeepSeek-V4 and V4.1 mathematics."""

__version__ = "0.1.0"
