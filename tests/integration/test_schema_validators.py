"""The modules that JSON Schema's validators import."""

import subprocess
import sys


def test_importing_the_validators_neither_imports_rfc3987_syntax_nor_blocks_its_later_import(tmp_path):
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
