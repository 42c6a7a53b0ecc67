"""Read checkpoints that others quantised: GPTQ, AWQ, compressed-tensors, 8-bit floats."""
