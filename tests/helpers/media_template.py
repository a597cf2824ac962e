"""Give a chat template with images."""

TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content or [] %}{% if p is mapping %}\
{{ p.text if p.text is string else '<|image_pad|>' }}{% else %}{{ p }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
