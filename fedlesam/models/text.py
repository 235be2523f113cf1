"""Small networks for texts: their inputs are rows of token numbers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlesam.core.checks import check_count
from fedlesam.models.small import Shape


class CharGRU(nn.Module):
    """Characters, read by a GRU; its last state says the next one.

    Args:
        vocabulary: How many characters there are.
        classes: Outputs of the head.
        width: Entries of a character's vector.
        hidden: Entries of the GRU's state.
        layers: Of the GRU.
    """

    def __init__(self, vocabulary: int, classes: int, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.read = nn.GRU(width, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.read(self.embed(x))
        logits: Tensor = self.head(states[:, -1])
        return logits


def char_gru(
    shape: Shape, classes: int, vocabulary: int, hidden: int = 128, layers: int = 1, width: int = 8
) -> nn.Module:
    """A GRU over characters and a linear head on its last state: LEAF's next character (there two LSTM layers of 256).

    Args:
        shape: (characters,) of a sample.
        classes: The number of classes.
        vocabulary: The number of characters.
        hidden: The width of the GRU.
        layers: Of the GRU.
        width: Of a character's embedding.
    """
    for name, value in (("hidden", hidden), ("layers", layers), ("width", width)):
        check_count("char-gru", name, value)
    return CharGRU(vocabulary, classes, width, hidden, layers)


class TextBag(nn.Module):
    """The mean of the words' vectors, and a head on it.

    Args:
        vocabulary: How many words there are; 0 stands for no word.
        classes: Outputs of the head.
        width: Entries of a word's vector.
        hidden: Units of the hidden layer; 0 for none.
    """

    def __init__(self, vocabulary: int, classes: int, width: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embed.weight, std=0.03)  # small, so that a step changes them much
        self.norm = nn.LayerNorm(width)
        self.head: nn.Module = nn.Linear(hidden or width, classes)
        if hidden:
            self.head = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), self.head)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(mean_of_words(self.embed(x), x)))
        return logits


def mean_of_words(states: Tensor, x: Tensor) -> Tensor:
    """The mean over the places of a text that hold a word: 0 is padding.

    Args:
        states: texts x places x width.
        x: texts x places, the token numbers.
    """
    there = (x != 0).to(states.dtype).unsqueeze(-1)
    return (states * there).sum(1) / there.sum(1).clamp(min=1)


def text_bag(shape: Shape, classes: int, vocabulary: int, width: int = 64, hidden: int = 0) -> nn.Module:
    """A bag of words: the mean of their embeddings, LayerNorm and a linear head (as fastText, Joulin et al., 2016).

    Args:
        shape: (words,) of a sample.
        classes: The number of classes.
        vocabulary: The number of words.
        width: Of a word's embedding.
        hidden: The width of a hidden layer; 0 for none.
    """
    check_count("text-bag", "width", width)
    check_count("text-bag", "hidden", hidden, at_least=0)
    return TextBag(vocabulary, classes, width, hidden)


class Block(nn.Module):
    """Attention and a hidden layer, each on what a LayerNorm makes of its input, and added to it.

    Args:
        width: Entries of a word's vector.
        heads: Of the attention.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.look, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, states: Tensor, there: Tensor) -> Tensor:
        parts = self.look(self.before(states)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        query, key, value = parts.unbind(2)  # each texts x heads x places x width / heads
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=there)
        states = states + self.mix(seen.transpose(1, 2).flatten(2))
        result: Tensor = states + self.think(self.between(states))
        return result


class TextTransformer(nn.Module):
    """Words and their places, some blocks of attention, and a linear head on the mean over the words.

    Args:
        places: The longest text, in words.
        vocabulary: How many words there are; 0 stands for no word.
        classes: Outputs of the head.
        width: Entries of a word's vector.
        layers: How many blocks there are.
        heads: Of the attention.
    """

    def __init__(self, places: int, vocabulary: int, classes: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Parameter(torch.randn(places, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        there = (x != 0)[:, None, None, :]
        states = self.embed(x) + self.place
        for block in self.blocks:
            states = block(states, there)
        logits: Tensor = self.head(mean_of_words(self.norm(states), x))
        return logits


def text_transformer(
    shape: Shape, classes: int, vocabulary: int, width: int = 64, layers: int = 2, heads: int = 4
) -> nn.Module:
    """A small transformer with LayerNorm first, from new weights (Vaswani et al., 2017).

    Args:
        shape: (words,) of a sample.
        classes: The number of classes.
        vocabulary: The number of words.
        width: Of the states; a multiple of the heads.
        layers: Blocks of attention.
        heads: Of the attention.
    """
    for name, value in (("width", width), ("layers", layers), ("heads", heads)):
        check_count("text-transformer", name, value)
    if width % heads:
        raise ValueError(f"text-transformer: width must be a multiple of the {heads} heads, got {width}")
    return TextTransformer(shape[0], vocabulary, classes, width, layers, heads)
