"""`PrivacyEngine`, the familiar cover over `clipper` and `privacy`, and what keeps it honest."""

from sfumato.engine.cover import PrivacyEngine as PrivacyEngine
from sfumato.engine.from_opacus import make_private as make_private
