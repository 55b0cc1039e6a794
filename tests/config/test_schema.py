"""The JSON schema, and the cost of importing the configuration."""

import json
import subprocess
import sys

from octavo.config import RECIPES, SCHEMA_FILE, Config, json_schema, schema_text


def test_committed_schema_is_current():
    again = "from octavo.config import SCHEMA_FILE, schema_text; SCHEMA_FILE.write_text(schema_text())"
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text(), f"run: python -c '{again}'"


def test_schema_has_descriptions_and_constraints():
    schema = json_schema()
    assert list(schema["properties"]) == ["extends", *Config.model_fields]
    for name, part in schema["$defs"].items():
        assert part["additionalProperties"] is False
        for key, field in part["properties"].items():
            assert len(field.get("description", "")) > 10, f"{name}.{key} is not described"


def test_extending_file_may_be_partial():
    schema = json_schema()
    assert "required" not in schema
    demanding = {name for name, part in schema["$defs"].items() if part.get("required")}
    assert demanding == {"Dataset", "Rule"}


def test_schema_is_plain_json():
    assert json.loads(schema_text()) == json.loads(json.dumps(json_schema()))


def test_recipes_match_fp8_package():
    from octavo import fp8

    assert tuple(fp8.RECIPES) == RECIPES[1:] and RECIPES[0] == "off"


def test_config_imports_quickly_without_torch():
    code = (
        "import sys, time; t = time.process_time(); import pydantic.main, ruamel.yaml; u = time.process_time();"
        "import octavo.config; print((time.process_time() - u) / (u - t),"
        "[m for m in ('torch', 'transformers', 'numpy', 'rich') if m in sys.modules])"
    )
    ratios = []
    for _ in range(5):  # relative to the import of its two libraries, best of a few, because machines differ
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        ratio, heavy = done.stdout.split(maxsplit=1)
        assert heavy == "[]\n"
        ratios.append(float(ratio))
        if ratios[-1] < 5:  # 1.9; a wrong file is reported within a second
            return
    raise AssertionError(f"importing octavo.config took {min(ratios):.1f} times what pydantic and ruamel.yaml take")
