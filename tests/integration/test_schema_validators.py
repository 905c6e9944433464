"""The modules that JSON Schema's validators import."""

import subprocess
import sys


def test_the_json_schema_validators_do_not_import_rfc3987_syntax_but_a_program_can_import_it(tmp_path):
    (tmp_path / "rfc3987_syntax.py").write_text("print('imported')\nis_valid_syntax = None\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import nni_manager.training_services.openpai.validation
print('validation')
import rfc3987_syntax
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["validation", "imported"]
