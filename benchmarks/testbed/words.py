"""The testbed's closed vocabulary: every word its generator can write.

Each word is one token of the bundled tokenizer, so that a chunk's length in tokens is its length in
pieces. Categories never overlap: the category of an answer alone says nothing about which rival is right.
"""


def spell(text: str) -> tuple[str, ...]:
    """The words of a line."""
    return tuple(text.split())


NAMES = spell("Alice Beth Clara Dora Edith Fiona Greta Helen Irene Julia Karen Laura Maria Nora Olga Paula")
ALIASES = spell("Falcon Raven Otter Badger Lynx Heron Viper Bison")
OBJECTS = spell(
    "pearls coins maps ropes lamps drums scarves candles books boots masks clocks rings bells flutes kites"
)
CONTAINERS = spell(
    "attic cellar barn chapel tower shed garage library kitchen tunnel stable closet vault mill orchard hut"
)
CITIES = spell(
    "Oslo Paris Cairo Lima Delhi Tokyo Rome Berlin Dublin Quito Hanoi Prague Lisbon Nairobi Sydney Boston"
)
METALS = spell(
    "copper silver gold tin zinc iron lead brass bronze nickel cobalt amber jade ivory coral quartz"
)
CODES = spell("dax wug blick fep toma zup kiv lorp")
CAMPS = spell("Alpha Bravo Charlie Delta Echo Foxtrot Kilo Tango")
FILLER_ADJECTIVES = spell("old quiet heavy narrow distant pale gentle broken early warm")
FILLER_NOUNS = spell("rivers clouds hills engines birds gardens letters bridges winds fields wolves ships")
FILLER_VERBS = spell("drifted waited turned slept faded gathered returned trembled settled rested")
FILLER_ADVERBS = spell("slowly often again nearby softly alone twice together")
FUNCTION_WORDS = spell(
    "Now meet is her We reach here hid in sold traded for means lies The by what were person city metal"
)

ALL_WORDS = (
    *FUNCTION_WORDS,
    *NAMES,
    *ALIASES,
    *OBJECTS,
    *CONTAINERS,
    *CITIES,
    *METALS,
    *CODES,
    *CAMPS,
    *FILLER_ADJECTIVES,
    *FILLER_NOUNS,
    *FILLER_VERBS,
    *FILLER_ADVERBS,
)
