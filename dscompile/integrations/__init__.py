"""Adapters that let other libraries' DeepSeek models run under the backend as they are."""
