"""Plain PyTorch models: graph sources like any user's own. They import `dscompile.formats` and nothing else of ours."""
