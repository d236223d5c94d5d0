# Tenants: to whom the cost of a page is charged. Charges are counted by bank, since a share is a fraction of each bank.
#
# Always:
#
# * Once shares are set, each page outside the blank part of the queue is charged to a tenant: to the tenant that took it or,
#   after another tenant's use, to the common tenant. Blank pages are charged to nobody.
# * A tenant's `num_free` is at most its `num_charged`, in each bank.

from libc.stdint cimport int32_t, uint8_t

cdef enum:
    MAX_BANKS = 4
    COMMON = 0                # tenant of pages that belong to no tenant
    MAX_TENANTS = 64          # the common one included
    NO_TENANT = 255           # a free page without an entry is charged to nobody

cdef struct Tenants:
    uint8_t *of_pages         # [num_pages] in the memory of `Expectations.stamps`; NULL: no shares were set
    int32_t num_charged[MAX_BANKS][MAX_TENANTS]  # pages that are held or cached
    int32_t num_free[MAX_BANKS][MAX_TENANTS]  # charged pages in the queue
    double shares[MAX_TENANTS]  # fraction of each bank; 0: nothing is charged to the tenant


cdef inline void charge(Tenants *tenants, int32_t bank, int32_t page_id, uint8_t tenant) noexcept nogil:
    """Charge a page outside the queue to another tenant."""
    cdef uint8_t before = tenants.of_pages[page_id]
    assert before < MAX_TENANTS and tenant < MAX_TENANTS and tenants.num_charged[bank][before] > 0
    tenants.num_charged[bank][before] -= 1
    tenants.num_charged[bank][tenant] += 1
    tenants.of_pages[page_id] = tenant
    assert tenants.num_free[bank][before] <= tenants.num_charged[bank][before]


cdef inline void begin_charge(Tenants *tenants, int32_t bank, int32_t page_id) noexcept nogil:
    """Charge a page that has left the queue to the common tenant, unless it is charged already."""
    if tenants.of_pages[page_id] == NO_TENANT:
        tenants.num_charged[bank][COMMON] += 1
        tenants.of_pages[page_id] = COMMON
    assert tenants.of_pages[page_id] < MAX_TENANTS


cdef inline void end_charge(Tenants *tenants, int32_t bank, int32_t page_id) noexcept nogil:
    """End the charge of a page that comes into the blank part of the queue."""
    cdef uint8_t tenant = tenants.of_pages[page_id]
    assert tenant < MAX_TENANTS and tenants.num_charged[bank][tenant] > 0
    tenants.num_charged[bank][tenant] -= 1
    tenants.of_pages[page_id] = NO_TENANT
    assert tenants.num_free[bank][tenant] <= tenants.num_charged[bank][tenant]


cdef inline void count_charged_free(Tenants *tenants, int32_t bank, int32_t page_id, int32_t change) noexcept nogil:
    """Count a charged page that enters the queue or, with a change of -1, leaves it. Blank pages are charged to nobody."""
    cdef uint8_t tenant = tenants.of_pages[page_id]
    if tenant != NO_TENANT:
        tenants.num_free[bank][tenant] += change
        assert 0 <= tenants.num_free[bank][tenant] <= tenants.num_charged[bank][tenant]
