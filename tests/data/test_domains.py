"""Data with domains: the publishers' layouts, pictures that do not decode, and one domain left out for the test."""

from pathlib import Path

import numpy as np
import pytest
import torch
from domain_files import colour, colours, expected, shades, write_domains, write_known, write_lists, write_picture
from hypothesis import given
from hypothesis import strategies as st

from fedlesam.data import _schemes, load
from fedlesam.data._check import check
from fedlesam.data.augment import flip
from fedlesam.data.catalogue import DOMAIN_SETS, parse_domains
from fedlesam.data.dataset import Domains
from fedlesam.data.download import fetch
from fedlesam.data.splits import make_split, save_split

# layouts


@pytest.mark.parametrize(
    ("name", "below"),
    [
        ("pacs", ""),
        ("pacs", "pacs"),
        ("pacs", "PACS/kfold"),
        ("pacs", "pacs/PACS"),
        ("officehome", "OfficeHomeDataset_10072016"),
        ("officehome", "officehome"),
        ("domainnet", "domainnet"),
    ],
)
def test_official_layouts(name: str, below: str, tmp_path: Path) -> None:
    write_known(tmp_path / below, name)
    data, known = load(f"{name}:size=12", tmp_path), DOMAIN_SETS[name]
    assert data.domains is not None
    assert data.domains.names == known.domains
    assert data.classes == tuple(f"class{i:03}" for i in range(known.classes))
    assert shades(data) == expected(len(known.domains), known.classes, 1)
    assert data.train.y.tolist() == list(range(known.classes)) * len(known.domains)
    assert data.domains.of.tolist() == [d for d in range(len(known.domains)) for _ in range(known.classes)]
    assert data.domains.test is None


def test_a_domain_is_found_under_its_other_spellings(tmp_path: Path) -> None:
    write_known(tmp_path, "officehome")
    (tmp_path / "Real World").rename(tmp_path / "RealWorld")
    data = load("officehome:size=12", tmp_path)
    split = make_split("leave-out:real-world", data, None, 0)
    assert split.scheme == "leave-out:Real World"
    assert split.test is not None and set(split.test.tolist()) == set(range(3 * 65, 4 * 65))


@pytest.fixture(scope="module")
def domainnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_known(tmp_path_factory.mktemp("domainnet"), "domainnet", 2)
    write_picture(root / "real" / "class007" / "not-listed.txt.png", (1, 2, 3))
    write_lists(root)
    (root / "real" / "class007" / "extra.png").write_bytes(b"in no list, so never read")
    return root


def test_domainnets_lists_say_which_images_and_labels(domainnet: Path) -> None:
    lists = domainnet / "real_train.txt"
    assert "real/class007/not-listed.txt.png 337" in lists.read_text()
    data = load("domainnet:size=12", domainnet)
    assert data.classes == tuple(f"class{i:03}" for i in reversed(range(345))), "labels as the lists have them"
    assert len(data.train) == 6 * 345 * 2 + 1
    pixels = data.train.x[:, :, 0, 0].tolist()
    for label, shade in list(zip(data.train.y.tolist(), pixels, strict=True))[:690]:
        assert shade[1] + 250 * (shade[2] % 10) == 344 - label


def test_domainnets_official_lists_give_the_parts(domainnet: Path) -> None:
    data = load("domainnet:size=12,lists=official", domainnet)
    split = make_split("leave-out:real", data, None, 0)
    assert data.domains is not None and split.test is not None
    number = lambda indices: (data.train.x[indices, 2, 0, 0] // 10).tolist()  # noqa: E731
    assert len(split.clients) == 5
    assert all(set(number(client)) == {1} and len(client) == 345 for client in split.clients), "of the train lists"
    assert set(number(split.test)) == {0} and len(split.test) == 345, "of the test list"
    assert split.dropped == 6 * 345 * 2 + 1 - 6 * 345


def test_a_limit_counts_both_lists_together(domainnet: Path) -> None:
    assert len(load("domainnet:size=12,limit=1", domainnet).train) == 6 * 345


def test_a_class_that_a_list_lacks_is_said(domainnet: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    linked(domainnet, tmp_path)
    for part in ("train", "test"):
        path = tmp_path / f"painting_{part}.txt"
        kept = [line for line in path.read_text().splitlines() if "class100" not in line]
        path.write_text("\n".join(kept))
    assert len(load("domainnet:size=12", tmp_path).train) == 6 * 345 * 2 - 1
    assert "painting_train.txt: has no image of class100" in caplog.text


def linked(root: Path, here: Path) -> Path:
    """Its folders, and lists of its own."""
    for path in root.iterdir():
        if path.is_dir():
            (here / path.name).symlink_to(path)
        else:
            (here / path.name).write_bytes(path.read_bytes())
    return here


def test_a_missing_list_is_an_error(domainnet: Path, tmp_path: Path) -> None:
    (linked(domainnet, tmp_path) / "real_test.txt").unlink()
    with pytest.raises(ValueError, match=r"real_test.txt are missing; found clipart_train.txt, .* and 3 more"):
        load("domainnet:size=12", tmp_path)
    for path in tmp_path.glob("*.txt"):
        path.unlink()
    with pytest.raises(ValueError, match=r"clipart_train.txt, .* are missing; found \."):
        load("domainnet:size=12,lists=official", tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("real/class003/nowhere.png 341", "1 images of the list files are not there, e.g. .*/class003/nowhere.png"),
        ("real/class003/000.png", "line 347: 'real/class003/000.png'; expected real/CLASS/IMAGE LABEL"),
        ("real/../../etc 0", "expected real/CLASS/IMAGE LABEL"),
        ("sketch/class003/000.png 3", "expected real/CLASS/IMAGE LABEL"),
        ("real/class003/000.png 5", "has label 5, which is class339 elsewhere"),
    ],
)
def test_wrong_lists(domainnet: Path, line: str, message: str, tmp_path: Path) -> None:
    with (linked(domainnet, tmp_path) / "real_train.txt").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(ValueError, match=message):
        load("domainnet:size=12", tmp_path)


def test_any_folder(tmp_path: Path) -> None:
    data = load(f"domains:{write_domains(tmp_path)},size=12")
    assert data.domains is not None
    assert (data.domains.names, data.classes) == (("ink", "oil", "photo"), ("cat", "dog"))
    assert shades(data) == expected(3, 2, 4)
    assert data.shape == (3, 12, 12)
    assert len(data.test) == 0


def test_a_folder_with_a_comma_in_its_name(tmp_path: Path) -> None:
    root = write_domains(tmp_path / "a,b" / "size=3,c")
    assert parse_domains(f"domains:{root},limit=2,size=20").path == root
    assert len(load(f"domains:{root},limit=2,size=20").train) == 12


def test_the_limit_takes_images_evenly(tmp_path: Path) -> None:
    data = load(f"domains:{write_domains(tmp_path, count=10)},size=12,limit=3")
    assert shades(data) == [colour(d, c, i) for d in range(3) for c in range(2) for i in (0, 3, 6)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pacs:size=0", "data pacs:size=0: size must be a whole number from 8, got '0'"),
        ("pacs:size=big", "size must be a whole number from 8, got 'big'"),
        ("pacs:limit=0", "limit must be a whole number from 1, got '0'"),
        ("pacs:sice=96", "unknown option of the data pacs: 'sice': did you mean 'size'"),
        ("pacs:lists=official", "only domainnet has lists"),
        ("domainnet:lists=some", "lists is all or official"),
        ("domains:", "expected domains:PATH, with images in PATH/DOMAIN/CLASS/"),
        ("domains:,size=96", "expected domains:PATH"),
        ("packs", "unknown data 'packs': did you mean 'pacs'"),
    ],
)
def test_names_that_make_no_sense(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(name, tmp_path)


# what is missing


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pacs: not found in .*PACS/kfold.*art_painting, cartoon, photo, sketch"):
        load("pacs", tmp_path)
    with pytest.raises(ValueError, match=r"holds 0 folders \(none\); expected at least two domains"):
        load(f"domains:{tmp_path / 'nowhere'}")


def test_a_missing_domain_shows_what_was_found(tmp_path: Path) -> None:
    write_known(tmp_path, "pacs")
    (tmp_path / "sketch").rename(tmp_path / "other")
    with pytest.raises(ValueError, match="domains of pacs sketch is missing; found art_painting, cartoon, photo"):
        load("pacs", tmp_path)


def test_a_missing_class_shows_what_was_found(tmp_path: Path) -> None:
    write_domains(tmp_path, classes=("cat", "dog", "elk"))
    (tmp_path / "oil" / "dog").rename(tmp_path / "oil" / ".dog")
    with pytest.raises(ValueError, match="oil: the class folders dog are missing, which other domains have; found cat"):
        load(f"domains:{tmp_path}")


def test_an_empty_class(tmp_path: Path) -> None:
    write_domains(tmp_path)
    for path in (tmp_path / "oil" / "dog").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match=r"oil/dog: a class without images"):
        load(f"domains:{tmp_path}")


def test_other_classes_than_the_data_sets(tmp_path: Path) -> None:
    write_domains(tmp_path, DOMAIN_SETS["pacs"].domains, ("cat", "dog"))
    with pytest.raises(ValueError, match="pacs has 7 classes, found 2: cat, dog"):
        load("pacs", tmp_path)
    assert len(load(f"domains:{tmp_path},size=12").train) == 32


def test_there_is_nothing_to_fetch(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pacs: is not downloaded; get it from its publishers"):
        fetch("pacs", tmp_path)


def test_the_usual_normalisation(tmp_path: Path) -> None:
    data = load(f"domains:{write_domains(tmp_path)},size=12")
    x, y = data.shard(torch.tensor([9])).tensors()
    wanted = (torch.tensor(colour(1, 0, 1)) / 255 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor(
        [0.229, 0.224, 0.225]
    )
    assert x[0, :, 3, 4].allclose(wanted, atol=1e-5)
    assert y.tolist() == [0]


def test_flip_mirrors_about_half() -> None:
    x = torch.arange(2000 * 3 * 2 * 4.0).view(2000, 3, 2, 4)
    y = flip(x, torch.Generator().manual_seed(0))
    mirrored = (y == x.flip(3)).flatten(1).all(1)
    assert torch.equal(mirrored, ~(y == x).flatten(1).all(1))
    assert 900 < mirrored.sum() < 1100


# splits


@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=6),
    per_domain=st.integers(1, 5),
    choice=st.integers(0, 5),
    seed=st.integers(0, 3),
)
def test_leave_out(sizes: list[int], per_domain: int, choice: int, seed: int) -> None:
    of = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    domains, target = Domains(tuple(f"d{i}" for i in range(len(sizes))), of), choice % len(sizes)
    make = lambda: _schemes.leave_out(domains, target, np.random.default_rng(seed), per_domain=per_domain)  # noqa: E731
    if any(size < per_domain for i, size in enumerate(sizes) if i != target):
        with pytest.raises(ValueError, match=f"{per_domain} clients are more than the"):
            make()
        return
    split = make()
    assert split.test is not None
    assert sorted(split.test) == [i for i, domain in enumerate(of) if domain == target]
    assert len(split.clients) == per_domain * (len(sizes) - 1)
    of_client = [set(of[client]) for client in split.clients]
    assert all(len(domains) == 1 and target not in domains for domains in of_client)
    others = [d for d in range(len(sizes)) if d != target]
    assert [domain for (domain,) in of_client] == [d for d in others for _ in range(per_domain)]
    assert sorted(np.concatenate([*split.clients, split.test])) == list(range(len(of))), "each image once"
    assert split.dropped == split.repeats == 0
    for d in range(len(sizes)):
        parts = [len(client) for client, (domain,) in zip(split.clients, of_client, strict=True) if domain == d]
        assert not parts or max(parts) - min(parts) <= 1


@pytest.mark.parametrize("spec", ["leave-out:oil", "leave-out:oil,2"])
def test_no_image_of_the_test_domain_is_trained_on(spec: str, tmp_path: Path) -> None:
    data = load(f"domains:{write_domains(tmp_path)},size=12")
    split = make_split(spec, data, None, 3)
    trained = {shade[0] for client in split.clients for shade in colours(data.train.x[client].numpy())}
    assert split.test is not None
    assert trained == {5, 85}
    assert {shade[0] for shade in colours(data.train.x[split.test].numpy())} == {45}
    assert split.scheme == spec


def test_the_seed_divides_a_domain(tmp_path: Path) -> None:
    data = load(f"domains:{write_domains(tmp_path, count=20)},size=12")
    one, same, other = (make_split("leave-out:ink,4", data, None, seed) for seed in (1, 1, 2))
    assert one.hash == same.hash != other.hash
    assert make_split("leave-out:ink", data, None, 1).hash == make_split("leave-out:ink", data, 2, 2).hash


@pytest.mark.parametrize(
    ("spec", "clients", "message"),
    [
        ("leave-out:oli", None, "unknown domain of domains:.* 'oli': did you mean 'oil'"),
        ("leave-out:", None, "known: ink, oil, photo"),
        ("leave-out:oil,0", None, "after the comma the clients of each domain are expected"),
        ("leave-out:oil,x", None, "after the comma the clients of each domain are expected"),
        ("leave-out:oil,9", None, "9 clients are more than the 8 images of the domain ink"),
        ("leave-out:oil,2", 5, "has 4 clients, not 5; leave the number out"),
        ("iid", 3, "split iid: .* has domains, and one of them must be left out .* one of ink, oil, photo"),
        ("pooled", None, "must be left out"),
    ],
)
def test_splits_that_make_no_sense(spec: str, clients: int | None, message: str, tmp_path: Path) -> None:
    data = load(f"domains:{write_domains(tmp_path)},size=12")
    with pytest.raises(ValueError, match=message):
        make_split(spec, data, clients, 0)


def test_data_without_domains() -> None:
    with pytest.raises(ValueError, match=r"split leave-out:oil: digits has no domains; domains:PATH and pacs"):
        make_split("leave-out:oil", load("digits"), None, 0)


def test_a_saved_split_keeps_its_test(tmp_path: Path) -> None:
    data = load(f"domains:{write_domains(tmp_path / 'data')},size=12")
    split = make_split("leave-out:oil,2", data, None, 0)
    save_split(split, data, tmp_path / "split")
    back = make_split(f"file:{tmp_path / 'split'}", data, None, 7)
    assert split.test is not None and back.test is not None
    assert back.test.tolist() == split.test.tolist()
    assert back.hash == split.hash
    content = bytearray((tmp_path / "split").read_bytes())
    at = content.index(split.test.astype("<i8").tobytes())
    content[at] ^= 1
    (tmp_path / "split").write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        make_split(f"file:{tmp_path / 'split'}", data, None, 0)


# batches


def test_a_large_client_is_streamed_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedlesam.core.batches import Batches

    data = load(f"domains:{write_domains(tmp_path)},size=12")
    shard = data.shard(torch.tensor([7, 3, 11, 0, 5]))
    whole = Batches(shard, torch.device("cpu"))
    assert whole.tensors is not None
    monkeypatch.setattr("fedlesam.data.dataset.STREAMED", 0)
    streamed = Batches(shard, torch.device("cpu"))
    assert streamed.tensors is None
    assert len(streamed) == len(whole) == 5
    for chosen in (torch.tensor([4, 0]), slice(None), torch.tensor([2])):
        for one, other in zip(whole.fetch(chosen, 0), streamed.fetch(chosen, 0), strict=True):
            assert torch.equal(one, other)


# what a user sees


def test_check_counts_by_domain(tmp_path: Path) -> None:
    write_domains(tmp_path)
    (tmp_path / "oil" / "dog" / "003.png").unlink()
    found = check(f"domains:{tmp_path},size=12")
    lines = found.lines()
    assert lines[0] == f"domains:{tmp_path},size=12: 23 images of 3 domains, 2 classes, 3 x 12 x 12"
    assert "domain oil: 7 images, 3 to 4 of a class" in lines
    assert len(found.files) == 23
