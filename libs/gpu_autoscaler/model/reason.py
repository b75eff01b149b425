"""What all reasons have in common."""

import msgspec


class Reason(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag_field="reason"):
    """Base of all reasons; subclasses are tagged with a snake_case name."""

    @classmethod
    def tag(cls) -> str:
        """The reason's name on the wire and in metric labels."""
        return str(cls.__struct_config__.tag)
