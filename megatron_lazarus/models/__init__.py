"""GPT from Megatron Core with MoE layers, its data and its tokenizers."""
