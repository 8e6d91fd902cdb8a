"""Data sets and the loader that cuts them into one shard per rank."""

from minidl.data.augment import Compose, RandomCrop, RandomHorizontalFlip
from minidl.data.cifar10 import cifar10
from minidl.data.dataset import ArrayDataset, Dataset, dataset, datasets, register
from minidl.data.digits import digits
from minidl.data.loader import Batch, Loader, shard
from minidl.data.synthetic import synthetic

__all__ = [
    "ArrayDataset",
    "Batch",
    "Compose",
    "Dataset",
    "Loader",
    "RandomCrop",
    "RandomHorizontalFlip",
    "cifar10",
    "dataset",
    "datasets",
    "digits",
    "register",
    "shard",
    "synthetic",
]
