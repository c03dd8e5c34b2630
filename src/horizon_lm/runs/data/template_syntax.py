"""Check the syntax of a chat template without transformers, which takes seconds to import, and without computing anything in it."""

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from horizon_lm.errors import ConfigError, first_line


class _Generation(Extension):
    """The tag around text that the assistant generates, which transformers adds to Jinja."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own form)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements between the tag and its end."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


EXTENSIONS = (_Generation, loopcontrols)


def require_syntax(template: str, name: str) -> None:
    """Raise ConfigError with the line if a chat template is no valid Jinja. ``name``: the path of its file as it is set."""
    try:
        jinja2.Environment(extensions=EXTENSIONS).parse(template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"chat_template_path: {name}:{error.lineno}: {first_line(error)}") from error
    except (RecursionError, ValueError):
        pass  # what else a template does to a parser is reported by the process that renders it
