"""Read checkpoints of others (Hugging Face, GGUF) and write the native one."""
