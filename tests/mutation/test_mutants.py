"""Each mutant is the change that it describes, and the list of survivors contains only existing mutants."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from tests.mutation import survivors
from tests.mutation.lua import places
from tests.mutation.mutants import LUA, Mutant, all_mutants
from tests.mutation.run import scripts_with
from tests.mutation.trial import scripts_from

from gristmill_api.store.scripts import source

SCRIPT = """#!lua flags=allow-oom
-- a comment: if x then y() end
local a, b = ARGV[1] or 'or', {[0] = 3, c = f(4)}
local function g(x, ...) return x and x.y < 5 end
if not a or b[1] == 'x' and g(6 <= 7) then
  redis.call('SET', a, '1')
elseif #b > 8 then
  b[9] = a .. 10
end
while a do local n = redis.call('HINCRBY', a, b, -1) end
repeat h() until not g(a)
return {redis.call('GET', a), n or 0}
"""


def changes(tmp_path: Path) -> list[str]:
    (tmp_path / "script.lua").write_text(SCRIPT)
    return [f"{mutant.kind}: {mutant.change}" for mutant in all_mutants(tmp_path)]


def test_mutants_of_a_script_are_the_expected_changes(tmp_path: Path) -> None:
    assert sorted(changes(tmp_path)) == sorted(
        [
            "one side: ARGV[1] or 'or' -> (ARGV[1])",
            "one side: ARGV[1] or 'or' -> ('or')",
            "number: 3 -> 4",
            "number: 4 -> 5",
            "one side: x and x.y < 5 -> (x)",
            "one side: x and x.y < 5 -> (x.y < 5)",
            "bound: < -> <=",
            "number: 5 -> 6",
            "never: not a or b[1] == 'x' and g(6 <= 7) -> false",
            "negated: not a -> not (not a)",
            "negated: b[1] == 'x' -> not (b[1] == 'x')",
            "negated: g(6 <= 7) -> not (g(6 <= 7))",
            "bound: <= -> <",
            "number: 6 -> 7",
            "number: 7 -> 8",
            "deleted: redis.call('SET', a, '1') -> nothing",
            "never: #b > 8 -> false",
            "negated: #b > 8 -> not (#b > 8)",
            "bound: > -> >=",
            "number: 8 -> 9",
            "deleted: b[9] = a .. 10 -> nothing",
            "number: 10 -> 11",
            "never: a -> false",
            "negated: a -> not (a)",
            "deleted: redis.call('HINCRBY', a, b, -1) -> ((tonumber(redis.call('HGET', a, b)) or 0) + -1)",
            "number: 1 -> 2",
            "deleted: h() -> nothing",
            "never: not g(a) -> false",
            "negated: not g(a) -> not (not g(a))",
            "one side: n or 0 -> (n)",
            "one side: n or 0 -> (0)",
            "number: 0 -> 1",
        ]
    )


def test_a_mutant_is_the_script_with_one_change(tmp_path: Path) -> None:
    (tmp_path / "script.lua").write_text(SCRIPT)
    (mutant,) = [one for one in all_mutants(tmp_path) if one.change == "redis.call('SET', a, '1') -> nothing"]
    assert mutant.text == SCRIPT.replace("redis.call('SET', a, '1')", "")


@pytest.mark.parametrize("text", ["if x then y()", "x = = 1", "goto there", "local s = [[long]]", "a:b()", "f() )"])
def test_lua_reader_refuses_unsupported_syntax(text: str) -> None:
    with pytest.raises(SyntaxError, match="line 1"):
        places(text)


def test_mutants_have_a_fixed_order_and_unique_keys() -> None:
    mutants = all_mutants()
    assert mutants == all_mutants()
    assert len({mutant.key for mutant in mutants}) == len(mutants) > 500
    assert {mutant.script for mutant in mutants} == {path.name for path in LUA.glob("*.lua")}


@pytest.mark.long
def test_redis_compiles_every_mutant(redis_url: str) -> None:
    """Every test would find a mutant that is not valid Lua, so such a mutant would prove nothing."""
    with redis.Redis.from_url(redis_url) as client, scripts_with(None) as folder, scripts_from(folder):
        for mutant in all_mutants():
            path = folder / "lua" / mutant.script
            path.write_text(mutant.text)
            client.script_load(source(user(mutant.script)))
            path.write_text((LUA / mutant.script).read_text())


def user(script: str) -> str:
    """Returns the name of this script, or of a script that includes it."""
    if not script.startswith("_"):
        return script.removesuffix(".lua")
    return next(path.stem for path in LUA.glob("*.lua") if f"-- include: {script}\n" in path.read_text())


def test_every_listed_survivor_is_a_mutant_with_a_reason() -> None:
    there = {mutant.key for mutant in all_mutants()}
    known = survivors.read()
    assert not [key for key in known if key not in there], "their lines changed: run `make mutants` for these scripts"
    assert not [key for key, why in known.items() if len(why.split()) < 4]


def test_added_survivor_is_read_back_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "survivors.toml"
    path.touch()
    mutant = Mutant("a.lua", 'say("it\\n")', "x -> y", 2, "negated", "")
    survivors.add([mutant], path)
    assert survivors.read(path) == {mutant.key: ""}
