"""Options after an alias."""

import pytest

from dstrat.errors import RequestError
from dstrat.plugins.options import AliasText, options_text, parse_alias


@pytest.mark.parametrize(
    ("text", "alias", "owner", "options"),
    [
        ("ddp", "ddp", None, {}),
        ("ddp@acme", "ddp", "acme", {}),
        ("ddp()", "ddp", None, {}),
        ("ddp@acme(x=1)", "ddp", "acme", {"x": 1}),
        ("bf16-mixed( scale = -2.5 )", "bf16-mixed", None, {"scale": -2.5}),
        (
            "mesh (pp=2, schedule='1F1B(x)', on=True, no=None, sizes=(1, [2]), more={'a@b': 3})",
            "mesh",
            None,
            {"pp": 2, "schedule": "1F1B(x)", "on": True, "no": None, "sizes": (1, [2]), "more": {"a@b": 3}},
        ),
        ("x(a=1,\n  b=2,\n)", "x", None, {"a": 1, "b": 2}),
    ],
)
def test_an_alias_has_an_owner_and_options(text, alias, owner, options):
    assert parse_alias(text) == AliasText(alias=alias, owner=owner, options=options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ddp(True)", "each option has its name, as in 'alias(count=2, name=\"text\")'"),
        ("ddp(**{'x': 1})", "each option has its name"),
        ("ddp(x=1", "write options as in"),
        ("ddp(x=1)@acme", "write the options last, as in 'alias@distribution(count=2)'"),
        ("ddp(x=1)(y=2)", "the options end the text"),
        ("ddp(x=1) or y", "the options end the text"),
        ("ddp(x=1, x=2)", "option 'x' is there twice"),
        ("ddp(x=fork)", "fork is no literal of Python, write x='fork'"),
        ("ddp(x=true)", "true is no literal of Python, write x=True"),
        ("ddp(x=null)", "null is no literal of Python, write x=None"),
        ("ddp(x=open('f'))", "x=open('f') is no literal, such as 2, True, 'text', (1, 2) or {'key': 3}; for other"),
        ("ddp(x=__import__('os').getcwd())", "is no literal"),
        ("ddp(x={[]: 1})", "is no literal"),
        (f"ddp(x={'(' * 9999}", "write options as in"),
        ("ddp(x=\0)", "write options as in"),
    ],
)
def test_anything_else_is_an_error_that_shows_how(text, message):
    with pytest.raises(RequestError) as error:
        parse_alias(text)
    assert message in str(error.value)
    assert str(error.value).startswith(f"{text!r} is not understood")


def test_options_are_shown_as_they_are_written():
    options = {"pp": 2, "schedule": "1F1B", "sizes": (1, 2)}
    assert options_text(options) == "(pp=2, schedule='1F1B', sizes=(1, 2))"
    assert parse_alias(f"mesh{options_text(options)}").options == options
    assert options_text({}) == ""


# In the catalog


def test_an_offer_with_options_has_them_in_its_record_and_its_name(site):
    site.add("acme", site.component("fast", "acme.strategy:Fast", options={"level": 3}))
    assert site.ask(
        """
        offer = get_catalog().find("strategy", "fast(size=2)")
        same = get_catalog().find("strategy", "fast@acme( size=2 )")
        [offer.full_alias, same.full_alias, offer.title, offer.component.options, find("fast")]
        """
    ) == [
        "fast@acme(size=2)",
        "fast@acme(size=2)",
        "strategy 'fast(size=2)' from acme 1.0",
        {"level": 3, "size": 2},
        "fast@acme",
    ]


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("fsat(x=1)", "strategy", "UnknownAliasError: strategy 'fsat' is not known: did you mean 'fast'?"),
        (
            "auto(x=1)",
            "strategy",
            "RequestError: strategy 'auto(x=1)': 'auto' stands for a choice, and has no options of its own: give",
        ),
        (
            "beads(x=1)",
            "accelerator",
            "RequestError: accelerator 'beads(x=1)': 'beads' stands for a choice, and has no options of its own: give",
        ),
    ],
)
def test_a_name_that_is_no_component_has_no_options(site, name, kind, message):
    site.add("acme", site.component("fast"), site.component("bead", kind="accelerator", groups=("beads",)))
    assert site.ask(f"find({name!r}, {kind!r})").startswith(message)
