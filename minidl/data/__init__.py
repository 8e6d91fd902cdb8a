"""Data sets and the loader that cuts them into one shard per rank."""

from minidl.data.augment import ColorJitter, Compose, RandomCrop, RandomHorizontalFlip, RandomResizedCrop
from minidl.data.cifar10 import cifar10
from minidl.data.coins import coins
from minidl.data.dali import DaliLoader
from minidl.data.dataset import ArrayDataset, Dataset, dataset, datasets, needs_path, register
from minidl.data.digits import digits
from minidl.data.files import ImageFiles
from minidl.data.folder import ImageFolder, image_folder
from minidl.data.loader import Batch, Loader, shard
from minidl.data.mixup import MixUp
from minidl.data.mnist import mnist
from minidl.data.synthetic import synthetic

__all__ = [
    "ArrayDataset", "Batch", "ColorJitter", "Compose", "DaliLoader", "Dataset", "ImageFiles", "ImageFolder",
    "Loader", "MixUp", "RandomCrop", "RandomHorizontalFlip", "RandomResizedCrop", "cifar10", "coins", "dataset",
    "datasets", "digits", "image_folder", "mnist", "needs_path", "register", "shard", "synthetic",
]  # fmt: skip
