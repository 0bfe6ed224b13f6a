"""transformers' `DeepseekV4ForCausalLM` (5.24): what it writes differently from everybody else."""
