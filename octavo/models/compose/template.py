"""The chat template of a composed model: the decoder's own, which knows only text, after images became text.

The contents of each message are joined to one text, in which an image is `<image>` and a line break; the decoder's
template follows unchanged, so a conversation without images is rendered as before.
"""

from __future__ import annotations

from octavo.models.custom.composed import IMAGE_TOKEN

_JOIN_PARTS = """\
{%- set joined = namespace(messages=[], text='') -%}
{%- for message in messages -%}
  {%- if message['content'] is defined and message['content'] is not none and message['content'] is not string -%}
    {%- set joined.text = '' -%}
    {%- for part in message['content'] -%}
      {%- if part['type'] == 'image' -%}
        {%- set joined.text = joined.text + 'IMAGE\\n' -%}
      {%- elif part['type'] == 'text' -%}
        {%- set joined.text = joined.text + part['text'] -%}
      {%- endif -%}
    {%- endfor -%}
    {%- set joined.messages = joined.messages + [dict(message, content=joined.text)] -%}
  {%- else -%}
    {%- set joined.messages = joined.messages + [message] -%}
  {%- endif -%}
{%- endfor -%}
{%- set messages = joined.messages %}
"""  # transformers drops this line break, so that the decoder's template begins at a line, as before


def add_images(template: str) -> str:
    """Return a chat template of text that also takes parts of type text and image."""
    return _JOIN_PARTS.replace("IMAGE", IMAGE_TOKEN) + template
