"""What is known beforehand about the public data sets: classes, shapes, statistics, files and where they come from."""

from dataclasses import dataclass, field

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

CIFAR100_CLASSES = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl",
    "boy", "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee",
    "clock", "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant",
    "flatfish", "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower",
    "leopard", "lion", "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom",
    "oak_tree", "orange", "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate",
    "poppy", "porcupine", "possum", "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark",
    "shrew", "skunk", "skyscraper", "snail", "snake", "spider", "squirrel", "streetcar", "sunflower",
    "sweet_pepper", "table", "tank", "telephone", "television", "tiger", "tractor", "train", "trout", "tulip",
    "turtle", "wardrobe", "whale", "willow_tree", "wolf", "woman", "worm",
)  # fmt: skip

FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


@dataclass(frozen=True)
class Official:
    name: str
    summary: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    """channels, height, width"""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    base_url: str
    fetched: tuple[str, ...]
    """The files that `fetch` gets, each at base_url + its name."""
    md5: dict[str, str]
    """Of every packed file its publishers offer."""
    plain_md5: dict[str, str] = field(default_factory=dict)
    """Of what is in the gzipped files, which others pack anew."""
    flip_and_crop: bool = False
    """The paper's augmentation."""


def _cifar(
    count: int, classes: tuple[str, ...], mean: tuple[float, ...], std: tuple[float, ...], **md5: str
) -> Official:
    return Official(
        name=f"cifar{count}",
        summary=f"60,000 colour photographs of {count} classes, 32 x 32",
        classes=classes,
        shape=(3, 32, 32),
        mean=mean,
        std=std,
        base_url="https://www.cs.toronto.edu/~kriz/",
        fetched=(f"cifar-{count}-python.tar.gz",),
        md5={f"cifar-{count}-{version}.tar.gz": value for version, value in md5.items()},
        flip_and_crop=True,
    )


def _mnist(
    name: str,
    summary: str,
    classes: tuple[str, ...],
    mean: float,
    std: float,
    base_url: str,
    md5: tuple[str, ...],
    plain_md5: tuple[str, ...],
) -> Official:
    files = tuple(f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
    return Official(
        name=name,
        summary=summary,
        classes=classes,
        shape=(1, 28, 28),
        mean=(mean,),
        std=(std,),
        base_url=base_url,
        fetched=files,
        md5=dict(zip(files, md5, strict=True)),
        plain_md5={file.removesuffix(".gz"): value for file, value in zip(files, plain_md5, strict=True)},
    )


OFFICIAL = {
    known.name: known
    for known in (
        _cifar(
            10,
            CIFAR10_CLASSES,
            (0.491, 0.482, 0.447),
            (0.247, 0.243, 0.262),
            python="c58f30108f718f92721af3b95e74349a",
            binary="c32a1d4ab5d03f1284b67883e8d87530",
        ),
        _cifar(
            100,
            CIFAR100_CLASSES,
            (0.5071, 0.4867, 0.4408),
            (0.2675, 0.2565, 0.2761),
            python="eb9058c3a382ffc7106e4002c42a8d85",
            binary="03b5dce01913d631647c71ecec9e9cb8",
        ),
        _mnist(
            "mnist",
            "70,000 handwritten digits, 28 x 28",
            tuple("0123456789"),
            0.1307,
            0.3081,
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            (
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "d53e105ee54ea40749a09fcbcd1e9432",
                "9fb629c4189551a2d022fa330f9573f3",
                "ec29112dd5afa0611ce80d1b7f02629c",
            ),
            (
                "6bbc9ace898e44ae57da46a324031adb",
                "a25bea736e30d166cdddb491f175f624",
                "2646ac647ad5339dbf082846283269ea",
                "27ae3e4e09519cfbb04c329615203637",
            ),
        ),
        _mnist(
            "fashion-mnist",
            "70,000 photographs of clothes, 28 x 28",
            FASHION_CLASSES,
            0.2860,
            0.3530,
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
            (
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "25c81989df183df01b3e8a0aad5dffbe",
                "bef4ecab320f06d8554ea6380940ec79",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
            (
                "f4a8712d7a061bf5bd6d2ca38dc4d50a",
                "9018921c3c673c538a1fc5bad174d6f9",
                "8181f5470baa50b63fa0f6fddb340f0a",
                "15d484375f8d13e6eb1aabb0c3f46965",
            ),
        ),
    )
}


def fetch_hint(name: str, folder: object) -> str:
    """The remedy for a file that is missing or spoilt."""
    return f"get it with `fedlesam data fetch {name} --data-dir {folder}`"
