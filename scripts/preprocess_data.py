#!/usr/bin/env python
"""Write Megatron indexed data sets (.bin, .idx) from text or JSON lines; see --help."""

from megatron_lazarus.models.preprocess import main

if __name__ == "__main__":
    raise SystemExit(main())
