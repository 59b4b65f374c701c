#!/usr/bin/env python
"""Pretrain a GPT-MoE: deepspeed --num_gpus 4 scripts/pretrain_gpt.py --deepspeed --deepspeed_config FILE …"""

from megatron_lazarus.pretrain_gpt import main

if __name__ == "__main__":
    raise SystemExit(main())
