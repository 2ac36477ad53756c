"""How commands present themselves: typer's, with help that is shorter and errors that name them."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


class _Shown:
    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""  # recent typer says <bool> beside each switch
            elif getattr(param, "nargs", 1) == -1:  # and <list[Path]> beside FILE
                param.display_type_rich = lambda ctx: None
        return params

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc]
        except Exception as e:  # as an option without its value
            if getattr(e, "ctx", ctx) is None:
                e.ctx = ctx  # type: ignore[attr-defined]
            raise


class Command(_Shown, TyperCommand):
    pass


class Group(_Shown, TyperGroup):
    pass
