"""How this project's own DeepSeek-V4.1 is written: plain PyTorch, packed pools, one function per chain."""
