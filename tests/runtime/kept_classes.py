"""Classes whose objects the codec tests keep, in a module of their own so that a fresh process finds them."""

from __future__ import annotations

import dataclasses
import enum
import functools
from datetime import datetime
from decimal import Decimal
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import pydantic

calls: list[str] = []


class Cabin(enum.Enum):
    ECONOMY = "economy"
    BUSINESS = {"not": "hashable"}  # noqa: RUF012 - a value of an enum


class Weekday(enum.IntEnum):
    MONDAY = 1
    TUESDAY = 2


class Status(enum.StrEnum):
    BOOKED = "booked"


class Extras(enum.Flag):
    MEAL = 1
    BAG = 2
    SEAT = 4

    @classmethod
    def _missing_(cls, value: object) -> Any:
        calls.append("Extras._missing_")
        return super()._missing_(value)


class Rights(enum.IntFlag):
    READ = 4
    WRITE = 2


@dataclasses.dataclass
class Passenger:
    name: str
    age: int
    seen: list[Any] = dataclasses.field(default_factory=list)
    number: int = dataclasses.field(init=False, default=7)
    made_by: ClassVar[str] = "us"

    def __post_init__(self) -> None:
        calls.append("Passenger.__post_init__")
        self.note = f"made for {self.name}"

    @functools.cached_property
    def initial(self) -> object:
        return object()


@dataclasses.dataclass(frozen=True)
class Money:
    amount: Decimal
    currency: str = "EUR"


@dataclasses.dataclass(frozen=True, slots=True)
class Seat:
    row: int
    letter: str


@dataclasses.dataclass(slots=True)
class Unfinished:
    done: int
    to_do: int = dataclasses.field(init=False)


@dataclasses.dataclass
class Trip:
    passengers: list[Passenger]
    price: Money
    seats: dict[Seat, str]
    when: datetime | None = None


T = TypeVar("T")


@dataclasses.dataclass
class Box(Generic[T]):
    item: T


class Leg(NamedTuple):
    start: str
    end: str
    minutes: int = 0


class Route(Leg):
    """A named tuple with attributes of its own and a ``__new__``."""

    def __new__(cls, start: str, end: str) -> Route:
        calls.append("Route.__new__")
        return super().__new__(cls, start, end, 60)


class Outer:
    @dataclasses.dataclass
    class Inner:
        x: int


class Address(pydantic.BaseModel):
    street: str
    floor: int | None = None


class Customer(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")

    name: str
    address: Address
    born: datetime | None = None
    page: pydantic.HttpUrl | None = None
    _visits: int = pydantic.PrivateAttr(default=0)

    @pydantic.model_validator(mode="after")
    def _note(self) -> Customer:
        calls.append("Customer validator")
        return self


class Pair(pydantic.BaseModel, Generic[T]):
    left: T
    right: T


class Names(pydantic.RootModel[list[str]]):
    pass


IntPair = Pair[int]


@pydantic.dataclasses.dataclass
class Checked:
    x: int


# -- refused ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class ByIdentity:
    x: int


@dataclasses.dataclass
class NeverEqual:
    x: int

    def __eq__(self, other: object) -> bool:
        return False


@dataclasses.dataclass
class RaisesWhenCompared:
    x: str

    def __eq__(self, other: object) -> bool:
        raise RuntimeError(f"cannot compare {self.x}")


@dataclasses.dataclass
class Closes:
    x: int

    def __del__(self) -> None:
        calls.append("Closes.__del__")


@dataclasses.dataclass
class Failure(Exception):
    code: int


@dataclasses.dataclass
class Holder:
    lock: object


class Plain:
    def __init__(self) -> None:
        calls.append("Plain.__init__")


def act() -> None:
    calls.append("act")


@dataclasses.dataclass(frozen=True)
class Picky:
    text: str

    def __hash__(self) -> int:
        return hash(self.text.index("-"))
