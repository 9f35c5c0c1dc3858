"""The self-test of an accelerator: ``stillframe doctor --device``.

:mod:`runner` starts the checks in processes of their own, with a deadline: a device may hang, or end the process that
uses it.  :mod:`checks` is what they say; :mod:`order`, :mod:`copies` and :mod:`trainee` are run in these processes.
"""
