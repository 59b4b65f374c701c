"""What is overridden in DeepSpeed and Megatron Core: one file per upstream module, each entry data with reasons."""
