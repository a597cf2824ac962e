"""The peak of a process's own memory, for the programs that tests run in a process of their own."""

# Not ru_maxrss: after exec that begins with the peak of the process that started this one.
PEAK = '''
import re
def peak():
    """The most memory that this process has had, in MiB."""
    with open("/proc/self/status") as status:
        return int(re.search(r"VmHWM:\\s*(\\d+)", status.read())[1]) / 1024
'''
