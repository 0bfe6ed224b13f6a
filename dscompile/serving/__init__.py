"""What prefill and decode ranks do step by step, and the way of a request from one to the other; docs/kv.md."""
