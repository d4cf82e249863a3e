"""The edges to Arrow: from columns to words of rows and back."""
