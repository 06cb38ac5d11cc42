"""Data: text or token ids -> shuffled, packed windows at one global position."""

from experiments.data.batches import Windows as Windows
from experiments.data.batches import held_out_batches as held_out_batches
from experiments.data.batches import padded_unevenly as padded_unevenly
from experiments.data.batches import training_batches as training_batches
from experiments.data.corpus import Corpus as Corpus
from experiments.data.corpus import DataConfig as DataConfig
from experiments.data.corpus import load as load
from experiments.data.corpus import unigram_loss as unigram_loss
from experiments.data.files import MAX_VOCABULARY as MAX_VOCABULARY
from experiments.data.packing import PackedSamples as PackedSamples
